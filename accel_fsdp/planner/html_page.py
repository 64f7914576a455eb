"""The frame of all HTML pages of this package: self-contained, light and dark, any width.

Figures come from `svg`; a page shows each in the width that fits. Pure.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from accel_fsdp.planner import svg

WIDTHS = (720, 360)
"""Each figure is drawn twice, for a window and for a phone; the style sheet shows one."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
OWN_STYLE = """
:root{color-scheme:light dark;--back:#fff;--ink:#1b1f24;--dim:#57606a;--rule:#d0d7de;--soft:#f3f5f7;--limit:#a40e26;
--c1:#b34700;--c2:#0072b2}
@media(prefers-color-scheme:dark){:root{--back:#14171c;--ink:#e6e9ee;--dim:#9aa4b0;--rule:#3a424c;--soft:#1e232a;
--limit:#ff8f8f;--c1:#ff9a4d;--c2:#63b9ee}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 16px 48px;max-width:832px;background:var(--back);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 8px;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:40px 0 4px}
p{margin:4px 0 12px;overflow-wrap:anywhere}.answer{font-size:1.0625rem}.dim,figcaption,footer{color:var(--dim)}
.strategies+.dim,figcaption,.key{font-size:.875rem}.strategies table{width:100%}.strategies td:nth-child(2){width:38%}
.strategies small{display:block;font-weight:400;white-space:normal;max-width:15em}
.strategies th{font-weight:400}.chosen tbody tr:first-child>*{font-weight:700;background:var(--soft)}
.bar{height:18px;overflow:hidden}.bar rect{stroke:none}svg.bar line{vector-effect:non-scaling-stroke}
.advice{border-left:4px solid var(--c2);margin-top:24px;padding-left:12px}
pre{margin:4px 0 12px;padding:8px 10px;border-radius:6px;background:var(--soft);font-size:.8125rem;
white-space:pre-wrap;overflow-wrap:anywhere}
figure{margin:12px 0}svg{display:block;width:100%;overflow:visible}.w360{display:none;max-width:480px}
.key{display:flex;flex-wrap:wrap;gap:4px 14px;list-style:none;padding:0;margin:8px 0}
.key svg{display:inline-block;width:20px;height:18px;vertical-align:-4px;margin-right:5px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
td,th:first-child{white-space:nowrap}th,td{padding:4px 6px;text-align:right;border-bottom:1px solid var(--rule)}
thead th{vertical-align:bottom}th:first-child{text-align:left;padding-left:0}summary{cursor:pointer;margin:12px 0}
@media(max-width:719px){.strategies table{font-size:.71875rem}.strategies :is(th,td){padding:2px 3px}
.strategies :is(th,td):nth-child(5){display:none}.strategies td:nth-child(2){width:30%}
.w720{display:none}.w360{display:block}}
"""
STYLE = f"{svg.STYLE}{OWN_STYLE}"
"""The style sheet of a whole page, figures included."""


def page(title: str, subject: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}: {escape(subject)}</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def section(title: str, lead: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(lead)}</p>{content}</section>"


def figure(draw: Callable[[int], str], caption: str) -> str:
    """A figure that `draw` makes in a width."""
    return f"<figure>{''.join(map(draw, WIDTHS))}<figcaption>{escape(caption)}</figcaption></figure>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table whose cells are HTML; it scrolls by itself where it is too wide."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="scroll {style}" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
