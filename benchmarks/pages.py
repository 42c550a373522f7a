"""Text that a program writes into pages, between two comments."""

from __future__ import annotations

from pathlib import Path


def with_section(page: str, name: str, section: str) -> str:
    """A page with the text between its comments `<!-- NAME:begin … -->` and `<!-- NAME:end -->` replaced.

    Raises:
        ValueError: a comment is missing, doubled, or stands in the wrong order.

    >>> with_section("a\\n<!-- t:begin -->\\nold\\n<!-- t:end -->\\nb", "t", "new")
    'a\\n<!-- t:begin -->\\nnew\\n<!-- t:end -->\\nb'
    """
    begin, end = f"<!-- {name}:begin", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must hold {begin} --> and {end} once each")
    head, _, rest = page.partition(begin)
    comment, _, inside = rest.partition("-->\n")
    _, found, tail = inside.partition(end)
    if not found:
        raise ValueError(f"{end} must stand behind {begin} -->")
    return f"{head}{begin}{comment}-->\n{section.strip()}\n{end}{tail}"


def write_section(path: Path, name: str, section: str) -> None:
    """Replaces a section of a file.

    Raises:
        ValueError: as `with_section`, naming the file.
    """
    try:
        path.write_text(with_section(path.read_text(), name, section))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
