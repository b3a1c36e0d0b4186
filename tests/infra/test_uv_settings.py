"""The installation finds packages where pip would: uv is given pip's settings, or leaves the work to pip."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "uv_settings.py"


def translated(*listing: str) -> tuple[int, list[str], str]:
    """(exit code, variables, message) for lines of `pip config list`."""
    done = subprocess.run([sys.executable, SCRIPT], input="\n".join(listing), capture_output=True, text=True)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


def test_no_settings_are_no_variables() -> None:
    assert translated() == (0, [""], "")


def test_places_and_the_certificate_are_passed_on_and_the_environment_comes_last() -> None:
    code, variables, _ = translated(
        ":env:.find-links='/opt/wheels /srv/wheels'",
        ":env:.quiet='0'",
        "global.constraint='/etc/caps.txt /srv/caps.txt'",
        "global.build-constraint='/etc/build.txt'",
        "global.cert='/etc/ssl/ca.crt'",
        r"global.extra-index-url='https://user:a=b@host/simple\nfile:///opt/simple'",
        "global.find-links='/overridden'",
        "install.index-url='https://mirror/simple'",
        "freeze.timeout='10'",
    )
    assert code == 0
    assert set(variables) == {
        "UV_DEFAULT_INDEX=https://mirror/simple",
        "UV_INDEX=https://user:a=b@host/simple file:///opt/simple",
        "UV_FIND_LINKS=/opt/wheels,/srv/wheels",
        "UV_CONSTRAINT=/etc/caps.txt /srv/caps.txt",
        "UV_BUILD_CONSTRAINT=/etc/build.txt",
        "SSL_CERT_FILE=/etc/ssl/ca.crt",
    }


def test_a_setting_that_uv_cannot_follow_leaves_the_work_to_pip() -> None:
    code, variables, message = translated("global.proxy='http://proxy:3128'", "global.cert='/etc/ssl/ca.crt'")
    assert (code, variables) == (1, [])
    assert "proxy" in message and "cert" not in message
