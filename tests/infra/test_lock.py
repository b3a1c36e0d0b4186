"""infra/lock: the image installs what constraints.txt pins, all that vitflow needs, each with its sha256."""

import re
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

LOCK = ROOT / "infra" / "lock"
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


def locked(name: str) -> dict[str, str]:
    """{package: version} of a file of the lock, each of whose lines has one hash."""
    lines = [
        line for line in (LOCK / name).read_text().splitlines() if not line.startswith("--extra-index-url https://")
    ]
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert lines and all(found), name
    return {match[1]: match[2] for match in found if match}


def needed() -> set[str]:
    """Every package that vitflow needs without its extras, as the packages installed here say."""
    seen: set[tuple[str, str]] = set()
    todo = [("vitflow", "")]
    while todo:
        name, extra = todo.pop()
        seen.add((name, extra))
        for requirement in map(Requirement, requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                package = canonicalize_name(requirement.name)
                todo += {(package, own) for own in {"", *requirement.extras}} - seen
    return {name for name, _ in seen} - {"vitflow"}


def test_it_pins_what_is_tested() -> None:
    everything = {name: version for file in LOCK.iterdir() for name, version in locked(file.name).items()}
    beside = {"setuptools", "wheel"} | {name for name in everything if re.match("triton$|nvidia-|cuda-", name)}
    for name in everything.keys() - beside - {"torch"}:
        assert everything[name] == PINS[name], f"{name}: run make lock"
    assert locked("cpu.txt") == {"torch": f"{PINS['torch']}+cpu"} and locked("cuda.txt")["torch"] == PINS["torch"]


def test_it_has_all_that_vitflow_needs_and_no_more() -> None:
    common = locked("packages.txt").keys() | locked("deepspeed.txt").keys()
    for device in ("cpu.txt", "cuda.txt"):
        assert not common & locked(device).keys()
    assert common == needed() - {"torch"} | {"setuptools", "wheel"}, "run make lock"


def test_the_image_installs_from_it_alone() -> None:
    """Each package with --require-hashes; vitflow itself without any."""
    text = re.sub(r"\\\n", "", (ROOT / "infra" / "Dockerfile").read_text())
    installs = re.findall(r"pip install ([^&\n]+)", text)
    assert len(installs) == 3
    for options in installs:
        assert "--no-deps" in options and ("--require-hashes" in options or options.split("-e")[1].split() == ["."])
        assert "--only-binary=:all:" in options or "--no-build-isolation" in options, "a build would install others"
