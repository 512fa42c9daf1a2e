"""Disturb two training runs at random for some minutes, and compare them with undisturbed ones (README.md).

python -m tests.soak --minutes 60 --seed 7. The exit status is 1 after any deviation; the evidence is kept.
"""

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.soak.events import CLOCK, KINDS
from tests.soak.runs import DeviationError
from tests.soak.soak import BEFORE, STORE, report_failure, soak
from tests.soak.table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="time of all, the comparison included")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all plans; by default the time")
    parser.add_argument("--events", default="", help=f"of {','.join(KINDS)}; -NAME leaves one out; all by default")
    parser.add_argument("--launches", type=int, help="disturbed launches, in place of --minutes")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the seconds that a launch lasts")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"), help="for the results, by seed")
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="repeat the last launch of the soak in FOLDER")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the launch that runs, as Ctrl-C
    if options.replay is not None:
        return replay(options.replay.resolve())
    kinds, folder = chosen(options.events), (options.folder / str(options.seed)).resolve()
    print(f"seed {options.seed}; events: {', '.join(kinds)}; everything is written to {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with soak(folder, options.seed, kinds) as running:
        try:
            running.disturb(60.0 * options.minutes, options.launches, options.scale)
            text = markdown(running.complete(), options.seed)
        except DeviationError as error:
            report_failure(folder, error)
            return 1
    (folder / "table.md").write_text(text)
    print(f"\n{text}\nwritten to {folder / 'table.md'}")
    return 0


def replay(failed: Path) -> int:
    """Repeat the last launch of the soak in the folder `failed`; returns 1 if it deviates again."""
    folder = failed / "replay"
    shutil.rmtree(folder, ignore_errors=True)
    with soak(folder, 0, list(KINDS) if (failed / BEFORE / STORE).exists() else [CLOCK]) as running:
        try:
            running.replay(failed)
        except DeviationError as error:
            report_failure(folder, error)
            return 1
    return 0


def chosen(text: str) -> list[str]:
    """The kinds of events that a list such as "kill,term" or "-outage,-cache" asks for. Raises SystemExit."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name.removeprefix("-") not in KINDS]
    if unknown:
        raise SystemExit(f"EVENTS: {', '.join(unknown)}: not known; known are {', '.join(KINDS)}")
    left_out = {name.removeprefix("-") for name in names if name.startswith("-")}
    wanted = [name for name in names if not name.startswith("-")] or list(KINDS)
    kinds = [name for name in wanted if name not in left_out]
    if not kinds:
        raise SystemExit(f"EVENTS: nothing is left; {CLOCK} for example is one")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
