"""What mkdocs does in addition to make the site.

Links of pages to files outside of docs lead to the repository's address if pyproject.toml has one, else they become plain text.
CONTRIBUTING.md becomes a page. A site that would load anything from elsewhere is an error, because it has to open without a network.
"""

from __future__ import annotations

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
PACKAGE = ROOT / "lightning_mfsdp/__init__.py"
VERSION = re.compile(r'^__version__ = "(.*)"$', flags=re.MULTILINE)
# Python has tomllib from 3.11 on only.
REPOSITORY = re.compile(r'^repository = "(.*)"$', flags=re.MULTILINE)

LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)"
)

# Attributes that make a browser load something, by tag. Links with these relations it does not load.
LOADED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
}
NOT_LOADED = {"alternate", "canonical", "next", "prev"}


def on_config(config: Any, **_: Any) -> Any:
    """Called by mkdocs first: the theme and the links below take the address and the version from where the package has them."""
    [config.repo_url] = REPOSITORY.findall(PROJECT.read_text(encoding="utf-8"))
    [version] = VERSION.findall(PACKAGE.read_text(encoding="utf-8"))
    config.repo_name = config.site_name
    config.copyright = f"{config.site_name} {version}"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(page.file.src_uri), target)
        )
        if path.startswith("docs/"):
            return match.group()
        return (
            f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
            if config.repo_url
            else text
        )

    return LINK.sub(replaced, markdown)


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the files of docs."""
    from mkdocs.structure.files import (
        File,
    )  # the other functions are tested without mkdocs

    files.append(File.generated(config, "contributing.md", content=contributing()))
    return files


def contributing() -> str:
    """CONTRIBUTING.md, with links as they are in docs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        return f"[{text}]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'}{anchor or ''})"

    return LINK.sub(moved, text)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Called by mkdocs when the site is complete.

    Raises:
        ValueError: A page loads something from elsewhere.
    """
    pages = sorted(Path(config.site_dir).rglob("*.html"))
    loaded = {
        address: page
        for page in pages
        for address in loaded_from_elsewhere(page.read_text(encoding="utf-8"))
    }
    if loaded:
        lines = [
            f"{page.relative_to(config.site_dir)}: {address}"
            for address, page in loaded.items()
        ]
        raise ValueError(
            "the site loads from elsewhere, so it does not open without a network: "
            + "; ".join(lines)
        )


def loaded_from_elsewhere(page: str) -> list[str]:
    """Addresses from which a browser would load something to show a page of HTML."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(
            self, tag: str, attributes: list[tuple[str, str | None]]
        ) -> None:
            values = {name: value or "" for name, value in attributes}
            address = values.get(LOADED.get(tag, ""), "")
            if (
                re.match("(https?:)?//", address)
                and not set(values.get("rel", "").split()) & NOT_LOADED
            ):
                found.append(address)

    Reader().feed(page)
    return found
