"""The images have fixed versions, no root, and no package archive but the distribution's."""

import re
from pathlib import Path

DOCKER = Path(__file__).parents[3] / "docker"
TEXT = (DOCKER / "Dockerfile").read_text()
CODE = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in CODE.splitlines() if line.strip()]
OWNER = "${USER_ID}:${GROUP_ID}"
BASES = [value for name, value in INSTRUCTIONS if name == "FROM"]
STAGES = {base.split(" AS ")[1] for base in BASES}


def test_base_images_have_a_full_version() -> None:
    outside = [base.split(" AS ")[0] for base in BASES if "$" not in base]
    assert len(outside) == 2
    for base in outside:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", base), base
    assert {"cuda", "cpu"} < STAGES and "ARG DEVICE=cuda" in TEXT


def test_it_does_not_run_as_root() -> None:
    users = [value for name, value in INSTRUCTIONS if name == "USER"]
    assert users == [OWNER] and "ARG USER_ID=1000" in TEXT, "set once, in the last stage"
    after = INSTRUCTIONS[INSTRUCTIONS.index(("USER", OWNER)) :]
    assert not any("apt-get" in value for _, value in after)
    assert all(f"--chown={OWNER}" in value for name, value in after if name == "COPY")


def test_packages_come_from_the_distribution_and_the_requirements() -> None:
    assert not re.search(r"add-apt-repository|ppa:|curl|wget|apt-key|sources\.list", CODE)
    installs = re.findall(r"pip install ([^&\n]+)", CODE)
    assert len(installs) == 3
    for arguments in installs:
        assert re.search(r"--requirement requirements|\^torch==|--no-deps --editable", arguments), arguments
    assert set(re.findall(r"https://([\w.]+)", CODE)) == {"pypi.org", "download.pytorch.org"}


def test_every_apt_layer_leaves_no_lists() -> None:
    for _, value in INSTRUCTIONS:
        if "apt-get install" in value:
            assert "--no-install-recommends" in value and "rm -rf /var/lib/apt/lists/*" in value


def test_the_page_names_the_bases_and_says_that_nothing_was_built() -> None:
    page = (DOCKER / "README.md").read_text()
    assert "Neither image has been built yet" in page
    for base in BASES:
        assert "$" in base or f"`{base.split(' AS ')[0]}`" in page
