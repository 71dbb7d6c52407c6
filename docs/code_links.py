"""Links from pages to source code: to the page of a file, to the line of a name, and code shown in the text.

A page links to files as GitHub needs it. On the site
    [scheduler.py](../m4_radix_cache/scheduler.py)                     leads to the page of the file,
    [`Scheduler.schedule`](../m4_radix_cache/scheduler.py)             to the line where this name is defined,
    [code: Scheduler.schedule](../m4_radix_cache/scheduler.py)         alone in a paragraph, becomes the code itself.
A name or a file that does not exist is a warning, which fails a strict build.
"""

import html
import logging
import re
import textwrap

from docs.source_code import ROOT, definitions, read_lines

LOG = logging.getLogger("mkdocs.hooks.code")
FILE = r"(m\d_\w+/[\w./]+\.(?:py|h|cpp))"
LINK = re.compile(rf"\[(?!code: )([^\[\]]+)\]\((?:\.\./)+{FILE}(?:#L(\d+))?\)")
HTML_LINK = re.compile(rf'(<a\b[^>]*\bhref=")(?:\.\./)+{FILE}(?:#L(\d+))?("[^>]*>)(.*?)(?=</a>)', re.DOTALL)
CODE = re.compile(rf"^( *)\[code: ([^\]]+)\]\((?:\.\./)+{FILE}\) *$", re.MULTILINE)
CODE_NAME = re.compile(r"(?:`|<code>)([A-Za-z_][\w.]*)(?:\(\))?(?:`|</code>)")
TITLE = re.compile(rf'(<span class="filename">){FILE}:(\d+)(?=</span>)')
API_HEADING = re.compile(r'<h\d id="(m\d_[\w.]+)" class="doc doc-heading">.*?(?=</h\d>)', re.DOTALL)


def page_of(path: str, line: int | str | None = None) -> str:
    """Return the address of a source file's page from the top of the site, with the anchor of a line."""
    return f"code/{path}.html" + (f"#L{line}" if line else "")


def target(path: str, text: str, line: str | None, page: str) -> str:
    """Return the address to which a link on `page` leads: of the file, or of the name that is the text of the link."""
    if not (ROOT / path).is_file():
        LOG.warning(f"{page} links to {path}, which does not exist")
        return page_of(path)
    if line and int(line) > len(read_lines(path)):
        LOG.warning(f"{page} links to line {line} of {path}, which has fewer lines")
    name = CODE_NAME.fullmatch(text.strip())
    if name is None or line or path.endswith(name[1]) or path.replace("/", ".") == f"{name[1]}.py":
        return page_of(path, line)
    if name[1] not in definitions(path):
        LOG.warning(f"{page} links to `{name[1]}` in {path}, which defines no such name")
        return page_of(path)
    return page_of(path, definitions(path)[name[1]].first)


def link_source(markdown: str, page: str) -> str:
    """Rewrite links to source files in the markdown of a page, and replace paragraphs `[code: name](file)` by code."""
    top = "../" * page.count("/")

    def link(found: re.Match[str]) -> str:
        text, path, line = found.groups()
        return f"[{text}]({top}{target(path, text, line, page)})"

    markdown = CODE.sub(lambda found: code_block(*found.groups(), page), LINK.sub(link, markdown))
    for left in re.findall(r"^.*\[code: .*$", markdown, re.MULTILINE):
        LOG.warning(f"{page}: a link [code: name](file) needs a file of a package and a paragraph of its own: {left}")
    return markdown


def code_block(margin: str, name: str, path: str, page: str) -> str:
    """Return a fenced block with the code of a name, with its line numbers in the file."""
    if not (ROOT / path).is_file() or name not in definitions(path):
        LOG.warning(f"{page} shows the code of {name} in {path}, which defines no such name")
        return ""
    first, last = definitions(path)[name]
    code = textwrap.dedent("\n".join(read_lines(path)[first - 1 : last]))
    language = "python" if path.endswith(".py") else "cpp"
    block = f'`````{{ .{language} title="{path}:{first}" linenums="{first}" }}\n{code}\n`````'
    return textwrap.indent(block, margin)


def link_html(page_html: str, page: str, top: str) -> str:
    """Rewrite links to source files in the HTML of a notebook, link titles of code, and headings of the reference.

    `top`: the relative address of the top of the site.
    """

    def link(found: re.Match[str]) -> str:
        start, path, line, end, text = found.groups()
        return f"{start}{top}{target(path, html.unescape(text), line, page)}{end}{text}"

    def title(found: re.Match[str]) -> str:
        start, path, line = found.groups()
        return f'{start}<a href="{top}{page_of(path, line)}">{path}:{line}</a>'

    page_html = TITLE.sub(title, HTML_LINK.sub(link, page_html))
    return API_HEADING.sub(lambda found: found[0] + _source_link(found[1], top), page_html)


def _source_link(name: str, top: str) -> str:
    """Return a link from the heading of a module, class or member to its source; nothing if the file is not found."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for path in ("/".join(parts[:length]) + ".py", "/".join(parts[:length]) + "/__init__.py"):
            if (ROOT / path).is_file():
                found = definitions(path).get(".".join(parts[length:]))
                line = found.first if found else None
                where = f"{path}:{line}" if line else path
                return f'<a class="source" href="{top}{page_of(path, line)}" title="{where}">source</a>'
    return ""
