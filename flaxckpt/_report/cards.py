"""Cards with a figure each, the headline of a page."""

from __future__ import annotations

from flaxckpt._util import html


def card(
    name: str,
    title: str,
    value: object,
    detail: object,
    kind: str | None = None,
    *,
    link: str | None = None,
    **data: object,
) -> html.Markup:
    """Returns a card.

    Args:
        name: The name of the card for programs, `data-card`.
        title: What the figure is.
        value: The figure.
        detail: A phrase below the figure.
        kind: `good`, `bad`, `main` or `main best`; None for plain.
        link: The identifier of the section or row that explains the figure.
        **data: HTML attributes of the card.
    """
    return html.element(
        "a" if link else "div",
        html.element("span", title, class_="card-title"),
        html.element("span", value, class_="card-value"),
        html.element("span", detail, class_="card-detail"),
        href=f"#{link}" if link else None,
        class_=f"card {kind}" if kind else "card",
        data_card=name,
        **data,
    )


def cards(*made: html.Markup) -> html.Markup:
    """Returns cards side by side."""
    return html.element("div", *made, class_="cards")
