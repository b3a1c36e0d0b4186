"""Translate pip's settings into environment variables of uv, which reads none of them.

In, on standard input: what `pip config list` prints. Out: NAME=VALUE, one per line. If uv has no counterpart for some
settings, exits with 1 and names them; pip must install then.
"""

from __future__ import annotations

import ast
import sys

SECTIONS = ("global", "install", ":env:")  # a later one overrides an earlier one
# pip separates several values by white space
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "build-constraint": ("UV_BUILD_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
# They do not change which packages are installed.
HARMLESS = {
    "cache-dir", "disable-pip-version-check", "no-cache-dir", "no-color", "no-input", "no-python-version-warning",
    "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip


def uv_variables(listing: str) -> tuple[dict[str, str], list[str]]:
    """Return uv's variables, and the names of pip's settings that have no counterpart."""
    settings: dict[str, str] = {}
    for section in SECTIONS:
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
    unknown = [name for name in settings if name not in VARIABLES.keys() | HARMLESS]
    variables = {
        variable: separator.join(settings[name].split())
        for name, (variable, separator) in VARIABLES.items()
        if name in settings
    }
    return variables, unknown


if __name__ == "__main__":
    variables, unknown = uv_variables(sys.stdin.read())
    if unknown:
        sys.exit(f"install: uv has no counterpart for pip's {', '.join(unknown)}, so pip installs")
    print(*(f"{name}={value}" for name, value in variables.items()), sep="\n")
