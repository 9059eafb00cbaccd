"""What ``bench`` found, as tables: for JSON with every sample, for Markdown, and for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sheeplike.commands.benchmark.measure import Quantity

Cell = Quantity | str
READ = ("steps", "variation", "acting", "update", "breakdown", "memory", "checkpoint", "growth")
SPREAD = "Medians over rounds that were taken in turns; in brackets the quartiles. Warm-up is not counted."


@dataclass
class Table:
    """Quantities in rows and columns.

    Attributes:
        key: name in JSON.
        title: for people.
        columns: headings of the columns behind the rows' names.
        rows: name to cells, as many as there are columns; a text says why there is no quantity, or is empty.
        notes: what a reader must know, sentences.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: dict[str, list[Cell]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[list[str]]:
        """All cells as text, the headings first."""
        return [["", *self.columns], *([name, *map(str, cells)] for name, cells in self.rows.items())]

    def to_json(self) -> dict[str, Any]:
        rows = {
            name: {
                column: cell.to_json() if isinstance(cell, Quantity) else cell
                for column, cell in zip(self.columns, cells, strict=True)
            }
            for name, cells in self.rows.items()
        }
        return {"title": self.title, "rows": rows, "notes": self.notes}

    def to_markdown(self) -> str:
        head, *body = (f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in self.lines())
        rule = "|" + " --- |" + " ---: |" * len(self.columns)
        return "\n".join([f"## {self.title}", "", head, rule, *body, *(f"\n{note}" for note in self.notes), ""])

    def to_text(self) -> str:
        """Aligned columns."""
        lines = self.lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title]
        for name, *cells in lines:
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join(["", name.ljust(widths[0]), *aligned]).rstrip())
        for note in self.notes:
            text += textwrap.wrap(note, 110, initial_indent="    ", subsequent_indent="    ")
        return "\n".join([*text, ""])


@dataclass
class Report:
    """One run of ``bench``.

    Attributes:
        title: what was measured.
        facts: the command, the date, the machine; name to text.
        settings: of ``bench``, and the whole configuration; plain data.
        tables: by key.
    """

    title: str
    facts: dict[str, str]
    settings: dict[str, Any]
    tables: dict[str, Table] = field(default_factory=dict)

    def add(self, tables: Iterable[Table]) -> None:
        """Take in tables, or what has been added to them; they are kept in the order in which people read them."""
        self.tables |= {table.key: table for table in tables}
        order = [*READ, *self.tables]
        self.tables = {key: self.tables[key] for key in dict.fromkeys(order) if key in self.tables}

    def to_json(self) -> dict[str, Any]:
        tables = {key: table.to_json() for key, table in self.tables.items()}
        return {"title": self.title, "facts": self.facts, "settings": self.settings, "tables": tables}

    def to_markdown(self) -> str:
        facts = ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in self.facts.items()), ""]
        tables = [table.to_markdown() for table in self.tables.values()]
        return "\n".join([f"# {self.title}", "", *facts, *tables, SPREAD, ""])

    def to_text(self) -> str:
        return "\n".join([*(table.to_text() for table in self.tables.values()), SPREAD])
