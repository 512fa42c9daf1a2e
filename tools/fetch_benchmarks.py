"""Download the data of long-context benchmarks into one folder, for machines without a network.

    python tools/fetch_benchmarks.py ruler babilong longbench --output benchmark_data
    python tools/fetch_benchmarks.py Xnhyacinth/LongBench --output benchmark_data

A name is a benchmark, a data set OWNER/NAME of the Hugging Face hub, or the address of a file. Copy the folder to the
other machine, and add `--datasets FOLDER` to `megatron-coca evaluate lm-eval`. A second call downloads only missing or
changed files. The exit status is 1 if a source cannot be downloaded.
"""

import argparse
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_coca.evaluation.tasks.lm_eval.benchmarks import BENCHMARKS, PUNKT, place_of
from megatron_coca.support.atomic_write import write_file

SECONDS = 60
"""Time limit for an answer of a web server."""


def sources(names: Sequence[str]) -> list[str]:
    """Return the sources that `names` stand for. Raises ValueError for an unknown name."""
    found: dict[str, None] = {}
    for name in names:
        if name not in BENCHMARKS and name != PUNKT and "/" not in name:
            raise ValueError(f"{name}: unknown benchmark; name {', '.join(BENCHMARKS)}, OWNER/NAME or an address")
        found |= dict.fromkeys(BENCHMARKS.get(name, (name,)))
    return list(found)


def fetch(source: str, folder: Path) -> None:
    """Download one source to its place below `folder`. Raises OSError if this fails."""
    place = place_of(source, folder)
    if source == PUNKT:
        import nltk

        data = folder / Path(PUNKT).parts[0]
        data.mkdir(parents=True, exist_ok=True)
        if not nltk.download(place.name, download_dir=str(data), quiet=True):
            raise OSError(f"nltk could not download {place.name}")
    elif source.startswith(("https://", "http://")):
        if not place.is_file():
            with urllib.request.urlopen(source, timeout=SECONDS) as answer:
                content = answer.read()
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, content)
    else:
        from huggingface_hub import snapshot_download

        snapshot_download(source, repo_type="dataset", local_dir=place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download all sources and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(BENCHMARKS)}, OWNER/NAME or an address")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the data")
    args = parser.parse_args(arguments)
    try:
        listed = sources(args.names)
    except ValueError as error:
        parser.error(str(error))
    status = 0
    for source in listed:
        try:
            fetch(source, args.output)
            print(f"{source}: in {place_of(source, args.output)}")
        except OSError as error:  # includes the errors of huggingface_hub and urllib
            print(f"{source}: cannot be downloaded ({error}); check the network and call again", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
