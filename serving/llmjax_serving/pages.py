"""The pages that a browser shows: fixed files, which tell nothing of this server."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

WEB = Path(__file__).parent / "web"
PAGES = {
    "/": ("playground.html", "text/html"),
    "/playground.css": ("playground.css", "text/css"),
    "/playground.js": ("playground.js", "text/javascript"),
    "/docs": ("docs.html", "text/html"),
    "/docs.js": ("docs.js", "text/javascript"),
    "/dashboard": ("dashboard.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
}
"""What a browser loads before it can send a key."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


async def page(request: web.Request) -> web.Response:
    name, content_type = PAGES[request.path]
    text = (WEB / name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)
