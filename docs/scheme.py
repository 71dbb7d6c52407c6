"""Pictures that read well on a light page and on a dark one: one SVG file for both schemes.

In these files grey belongs to the page: black is its ink, white its paper, and any grey is ink that covers less. Other
colors are fixed. A browser chooses by the reader's preference, as on GitHub; `picture.svg#only-light` and
`picture.svg#only-dark` choose a scheme, and MkDocs' theme shows the one of the two that fits its own switch.
`python -m benchmarks` writes the plots, `python -m docs.house` the picture of the packages.
"""

import re
from collections import Counter
from string import ascii_letters

COLORS = ("#1d85c8", "#cc8400", "#009e73", "#d9483b", "#cc79a7")
"""Blue, orange, green, red, purple: those of Okabe and Ito, changed where the contrast to a paper was near 3."""
ON_PALE, ON_DEEP = "#000001", "#fffffe"
"""Text on a fixed color. Not quite black and white, which follow the page."""
LIGHT, DARK = "--ink:#1f2328;--paper:#fff", "--ink:#dfe3ee;--paper:#1e2129"
STYLE = (
    f":root{{{LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    f"#only-light:target{{{LIGHT}}}#only-dark:target{{{DARK}}}#only-dark{{fill:var(--ink)}}"
    "*{stroke-linejoin:round}text{font-family:sans-serif;white-space:pre}"
)
GREY = re.compile(r"(fill|stroke): ?#([0-9a-f]{2})\2\2(?![0-9a-f])")
NUMBER = r"(-?[\d.]+)"
RECTANGLE = re.compile(rf"M {NUMBER} {NUMBER} L {NUMBER} \2 L \3 {NUMBER} L \1 \4 (?:L \1 \2 )?z")


def document(width: float, height: float, body: str, scale: float = 1) -> str:
    """Return an SVG document; the colors `var(--ink)` and `var(--paper)` of its elements are those of the page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scale * width:.0f}" height="{scale * height:.0f}" '
        f'viewBox="0 0 {width:g} {height:g}">\n<style>{STYLE}</style>\n'
        f'<g id="only-light"><g id="only-dark">\n{body}\n</g></g>\n</svg>\n'
    )


def themed(svg: str) -> str:
    """Return matplotlib's SVG as a document whose greys follow the page, without what a browser does not need."""
    head = re.search(r'<svg .*?viewBox="0 0 ([\d.]+) ([\d.]+)".*?>', svg, re.DOTALL)
    assert head, "no SVG of matplotlib"
    body = svg[head.end() : svg.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.S)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
    body = re.sub(r'<path [^>]*style="fill: none"/>', "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = re.sub(r' (fill|stroke)="(#[0-9a-f]{6})"', r' style="\1: \2"', body)
    body = re.sub(r' (d|x|y|transform|width|height)="([^"]*)"', _shorter, body)
    body = re.sub(r">\s*\n\s*<", ">\n<", body).strip()
    while body != (body := re.sub(r"<g>\n</g>\n|<defs/>\n", "", body)):
        pass
    body = re.sub(r'(?:<use href="#m\w+" x=[^>]*/>\n){50,}', lambda run: _dots(run[0], body), body)
    return document(float(head[1]), float(head[2]), _with_classes(body), scale=1.4)


def _shorter(attribute: re.Match[str]) -> str:
    """Return an attribute with two decimals, and rectangles by their edges."""
    value = re.sub(r"(\d\.\d\d)\d+", r"\1", re.sub(r"\s+", " ", attribute[2]).strip())
    value = RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", value)
    return f' {attribute[1]}="{value}"'


def _dots(run: str, body: str) -> str:
    """Return many equal round marks as one line: a line without a length shows its round ends."""
    mark, style = re.findall(r'href="#(m\w+)".*style="fill: (#\w+)', run)[0]
    radius = re.search(rf'id="{mark}" d="M 0 ([\d.]+) C', body)
    if not radius:
        return run
    places = "".join(f"M{x} {y}h0" for x, y in re.findall(r'x="(.*?)" y="(.*?)"', run))
    color = f"fill: none; stroke: {style}; stroke-width: {2 * float(radius[1]) + 1:g}; stroke-linecap: round"
    return f'<path d="{places}" style="{color}"/>\n'


def _with_classes(body: str) -> str:
    """Replace each style by a class, the most frequent ones by the shortest names."""
    styles = Counter(re.findall(r' style="([^"]*)"', body))
    names = [*ascii_letters, *(first + second for first in ascii_letters for second in ascii_letters)]
    classes = {style: name for (style, _), name in zip(styles.most_common(), names, strict=False)}
    rules = "".join(f".{name}{{{_of_the_page(style)}}}" for style, name in classes.items())
    return f"<style>{rules}</style>\n" + re.sub(r' style="([^"]*)"', lambda own: f' class="{classes[own[1]]}"', body)


def _of_the_page(style: str) -> str:
    """Return a style whose greys are the ink and the paper of the page."""

    def color(grey: re.Match[str]) -> str:
        cover = 1 - int(grey[2], 16) / 255
        if not cover:
            return f"{grey[1]}:var(--paper)"
        thin = "" if cover == 1 else f";{grey[1]}-opacity:{min(1, 1.15 * cover):.2g}"
        return f"{grey[1]}:var(--ink){thin}"

    style = re.sub(r"font-family: ([^;]*);?", lambda own: "font-family:monospace;" * ("Mono" in own[1]), style)
    return re.sub(r"([:;]) +", r"\1", GREY.sub(color, style))
