"""Service of clients over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.experiments.report.pictures.panels import busiest
from tokenyard.experiments.report.pictures.style import (
    MAX_PANELS,
    Picture,
    key,
    label_outer,
    linear_axis,
    look,
    make_panels,
)

if TYPE_CHECKING:
    from tokenyard.experiments.report.digest import Service
    from tokenyard.experiments.report.layout import Layout


def client_service(layout: Layout) -> Picture | None:
    """None where requests have no clients."""
    found = _services(layout)
    if not found:
        return None
    figure, panels = make_panels(len(found))
    clients = list(dict.fromkeys(client for _, service in found for client in service.clients))
    looks = {client: look(number) for number, client in enumerate(clients)}
    for panel, (label, service) in zip(panels, found, strict=True):
        for client, tokens in zip(service.clients, service.tokens, strict=True):
            panel.plot(service.times, tokens / 1e3, color=looks[client].colour, linestyle=looks[client].dash)
        panel.set_title(label)
        linear_axis(panel, "x")
        linear_axis(panel, "y")
    label_outer(panels, "Time (s)", "Service (1,000 tokens)")
    key(figure, [(client, looks[client]) for client in clients])
    return Picture("client_service", "Service of clients over time", _caption(layout, found), figure)


def _services(layout: Layout) -> list[tuple[str, Service]]:
    """Of the busiest condition, with the first seed."""
    found = []
    for setting in layout.settings:
        runs = layout.runs(busiest(layout), setting)
        service = runs[min(runs)].digest.service if runs else None
        if service is not None:
            found.append((layout.setting_label(setting), service))
    return found[:MAX_PANELS]


def _caption(layout: Layout, found: list[tuple[str, Service]]) -> str:
    where = f"At {label}" if (label := layout.condition_label(busiest(layout))) else "One run each"
    others = max(service.num_others for _, service in found)
    more = f" The {others} clients that got least have no line." if others else ""
    return f"{where}, first seed. Prompt tokens plus twice the output tokens, up to each time.{more}"
