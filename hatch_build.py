"""What hatchling adds to the metadata at build time: the README, and addresses if the repository has one.

The one setting is `repository` in pyproject.toml, under `[tool.hatch.metadata.hooks.custom]`. If it is empty, there are no project URLs,
and README links stay relative. If it is an address, such as "https://github.com/owner/name", PyPI shows it, and README links lead to it.
The hook of the site (docs/hooks.py) reads the same line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["RepositoryHook", "absolute_links", "project_urls"]

# A link or a picture whose target is neither an address nor a place on the same page. Code is found first, and left alone.
_RELATIVE = re.compile(
    r"```.*?```|`[^`]*`|(?P<picture>!?)(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!https?:|mailto:|#)(?P<target>[^)\s]+)\)",
    flags=re.DOTALL,
)


def absolute_links(markdown: str, repository: str) -> str:
    """Relative links lead to the repository's files, pictures to their bytes; nothing changes if `repository` is empty."""
    if not repository:
        return markdown
    base = repository.rstrip("/")

    def absolute(link: re.Match[str]) -> str:
        if link["target"] is None:
            return link.group()
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}{link['text']}({base}/{kind}/main/{link['target']})"

    return _RELATIVE.sub(absolute, markdown)


def project_urls(repository: str) -> dict[str, str]:
    """The links that PyPI shows beside the description."""
    if not repository:
        return {}
    base = repository.rstrip("/")
    return {
        "Repository": base,
        "Documentation": f"{base}/blob/main/docs/index.md",
        "Changelog": f"{base}/blob/main/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }


class RepositoryHook(MetadataHookInterface):
    """Fills in the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the fields of `[project]`."""
        repository = self.config["repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, repository)}
        metadata["urls"] = project_urls(repository)
