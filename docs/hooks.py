"""Links of pages to files outside of docs, for mkdocs: to the repository's address if pyproject.toml has one, else plain text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# Python has tomllib from 3.11 on only.
REPOSITORY = re.compile(r'^repository = "(.*)"$', flags=re.MULTILINE)

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any, **_: Any) -> Any:
    """Called by mkdocs first: the theme and the links below take the address from where the package has it."""
    [config.repo_url] = REPOSITORY.findall(PROJECT.read_text(encoding="utf-8"))
    config.repo_name = config.site_name
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith("docs/") and not path.endswith("/benchmarks"):
            return match.group()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})" if config.repo_url else text

    return LINK.sub(replaced, markdown)
