"""One self-contained HTML page: headings, text, tables and plots, nothing fetched from anywhere."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from multilinear.files import write_atomically

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2430;background:#fff}
h1{margin-bottom:.2rem}h2{margin-top:2.2rem;border-bottom:1px solid #d9dee7}.lead{font-size:1.15rem;color:#48566a}
table{border-collapse:collapse;margin:.8rem 0}th,td{padding:.3rem .8rem;border-bottom:1px solid #e3e7ee;text-align:left}
td:not(:first-child){font-variant-numeric:tabular-nums}img{max-width:100%}figure{margin:1rem 0}
figcaption{color:#48566a;font-size:.92rem}pre{background:#f4f6f9;padding:.8rem;overflow-x:auto}
"""


class Report:
    """Collects parts of a page in order.

    >>> import tempfile
    >>> page = Report("Digits", "98.9% on the test set")
    >>> page.heading("Model")
    >>> page.table(["blocks", "degree"], [[3, 64]])
    >>> page.write(Path(tempfile.mkdtemp()) / "report.html").name
    'report.html'
    """

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>", f"<p class=lead>{html.escape(lead)}</p>"]

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
        self._parts.append(f"<table><tr>{head}</tr>{body}</table>")

    def figure(self, figure: Figure, caption: str) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
        data = base64.b64encode(buffer.getvalue()).decode()
        text = html.escape(caption)
        self._parts.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )

    def write(self, path: str | Path) -> Path:
        path = Path(path)
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
            + "\n".join(self._parts)
            + "</body></html>\n"
        )
        write_atomically(path, lambda part: part.write_text(page, encoding="utf-8"))
        return path
