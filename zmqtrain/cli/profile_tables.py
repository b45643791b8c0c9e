"""A measured profile as JSON rows and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from zmqtrain.cli.table import table_of
from zmqtrain.topology.rounded import rounded_amount, rounded_rate, rounded_time

if TYPE_CHECKING:
    from zmqtrain.launcher.links import Links
    from zmqtrain.train.device.measured import LinkSpeed, Measured
    from zmqtrain.train.device.profile import Layer, Profile

LEAST_WIDTH = 120
_LISTS = ("sizes", "thread_counts", "layouts", "hosts", "links")


def rows(profile: Profile) -> Iterator[dict[str, Any]]:
    """The rows of a profile: the machine, the layers, the step for each number of samples, and what else was tried."""
    measured = asdict(profile.known())
    facts = {key: value for key, value in measured.items() if key not in _LISTS}
    yield {
        **{"row": "profile", "name": profile.name, "source": profile.source, "parameters": profile.numel},
        **{"batch_size": profile.batch_size, "update_s": profile.update_s, "evaluate_s": profile.evaluate_s, **facts},
    }
    for layer in profile.layers:
        yield {"row": "layer", **asdict(layer)}
    for size in profile.known().sizes:
        yield {"row": "size", **asdict(size), "samples_per_s": size.samples_per_s}
    for name, row in (("thread_counts", "threads"), ("layouts", "layout"), ("hosts", "host"), ("links", "link")):
        for values in measured[name]:
            yield {"row": row, **values}


def print_profile(profile: Profile, file: str | None) -> None:
    """Print a profile as tables."""
    console, measured = _console(), profile.known()
    _print(console, f"[bold]{escape(profile.name)}[/]: {profile.numel:,} parameters; {escape(profile.source)}")
    _print(console, _peak(measured))
    _layers(console, profile)
    if measured.conv_share:
        _print(console, f"convolutions together: [bold]{measured.conv_share:.0%}[/] of the peak in forward and backward")
    fc = f"from {measured.fc_from} on" if measured.fc_from else "none"
    _print(console, f"\n[bold]Steps[/] (t_conv, t_fc: forward and backward of the two phases; the FC phase: {escape(fc)})")
    table = table_of(">samples", ">t_conv", ">t_fc", ">samples/s", ">memory", "", overflow="ellipsis")
    for size in measured.sizes:
        mark = "the fewest with the best throughput: b_p" if size.samples == measured.micro_batch else ""
        conv, fc_ = _spread(size.conv_s, size.conv_spread_s), _spread(size.fc_s, size.fc_spread_s)
        table.add_row(str(size.samples), conv, fc_, f"{size.samples_per_s:,.0f}", rounded_amount(size.memory), mark)
    console.print(table)
    for threads in measured.thread_counts:
        chosen = " (chosen)" if threads.threads == measured.threads else ""
        _print(console, f"{threads.threads} threads: {threads.samples_per_s:,.0f} samples/s{chosen}")
    for layout in measured.layouts:
        _print(console, f"images with channels {layout.layout}: {layout.samples_per_s:,.0f} samples/s")
    if (advice := advised(measured)) is not None:
        _print(console, advice)
    _print(console, f"the optimizer: {rounded_time(profile.update_s)}; an evaluation: {rounded_time(profile.evaluate_s)}")
    if measured.links:
        _links(console, measured.links)
    if file is not None:
        _print(console, f'written to {escape(file)}: set \\[compute] profile = "{escape(file)}"')


def print_links(links: Links, file: str | None) -> None:
    """Print measured links as tables."""
    console = _console()
    for host in links.hosts:
        _print(console, f"{escape(host.name)}: {host.flops / 1e9:,.0f} GFLOP/s in matrix products")
    _links(console, links.links)
    if file is not None:
        _print(console, f"added to {escape(file)}")


def advised(measured: Measured) -> str | None:
    """Advice to change the memory layout, if another one is clearly faster than the job's."""
    rates = {layout.layout: layout.samples_per_s for layout in measured.layouts}
    if rates.get("last", 0.0) > 1.05 * rates.get("first", 0.0) and not measured.channels_last:
        return f"channels_last = true in \\[compute] would make steps {rates['last'] / rates['first']:.2f} times as fast"
    if measured.channels_last and rates.get("first", 0.0) > 1.05 * rates.get("last", 0.0):
        return f"steps would be {rates['first'] / rates['last']:.2f} times as fast without channels_last"
    return None


def _peak(measured: Measured) -> str:
    text = f"{measured.peak_flops / 1e9:,.0f} GFLOP/s with {measured.threads} thread{'s' * (measured.threads != 1)}"
    if measured.peak_flops_one_thread and measured.threads > 1:
        text += f", {measured.peak_flops_one_thread / 1e9:,.0f} with one"
    slower = ""
    if measured.sgemm_flops < 0.95 * measured.peak_flops:
        slower = f" (torch.mm: {measured.sgemm_flops / 1e9:,.0f}; convolutions use another library)"
    return f"a large matrix product: {text}{slower}"


def _layers(console: Console, profile: Profile) -> None:
    _print(console, f"\n[bold]Layers[/], {profile.batch_size} samples: medians ± half the interquartile range")
    table = table_of("layer", "kind", "phase", ">parameters", ">forward", ">backward", ">of the peak", overflow="ellipsis")
    for layer in profile.layers:
        table.add_row(
            escape(layer.name or "(the model's own)"),
            layer.kind,
            layer.phase,
            f"{layer.numel:,}" if layer.numel else "",
            _spread(layer.forward_s, layer.forward_spread_s),
            _spread(layer.backward_s, layer.backward_spread_s),
            _share(layer),
        )
    console.print(table)


def _links(console: Console, links: tuple[LinkSpeed, ...]) -> None:
    table = table_of("from", "to", ">bandwidth", ">one way", overflow="ellipsis")
    for link in links:
        table.add_row(escape(link.source), escape(link.target), rounded_rate(link.bandwidth), rounded_time(link.latency_s))
    console.print(table)


def _share(layer: Layer) -> str:
    return f"{layer.peak_share:.0%}" if layer.peak_share else ""


def _spread(seconds: float, spread: float) -> str:
    return f"{rounded_time(seconds)} ± {rounded_time(spread)}"


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _console() -> Console:
    return Console(width=max(LEAST_WIDTH, Console().width))
