"""The images do not run as root, and their bases have full versions."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docker" / "Dockerfile").read_text()
CODE = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in CODE.splitlines() if line.strip()]
OWNER = "${USER_ID}:${GROUP_ID}"


def test_base_images_have_a_full_version() -> None:
    bases = [value.split(" AS ")[0] for name, value in INSTRUCTIONS if name == "FROM" and "$" not in value]
    assert bases
    for base in bases:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", base), base


def test_it_does_not_run_as_root() -> None:
    users = [value for name, value in INSTRUCTIONS if name == "USER"]
    assert users == [OWNER] and "ARG USER_ID=1000" in TEXT, "set once, in the last stage"
    after = INSTRUCTIONS[INSTRUCTIONS.index(("USER", OWNER)) :]
    assert not any("apt-get" in value for _, value in after)
    assert all(f"--chown={OWNER}" in value for name, value in after if name == "COPY")
