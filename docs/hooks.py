"""Links of pages to files outside of docs, for mkdocs: to the repository's address if mkdocs.yml has one (`repo_url`), else plain text."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith("docs/") and not path.endswith("/benchmarks"):
            return match.group()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})" if config.repo_url else text

    return LINK.sub(replaced, markdown)
