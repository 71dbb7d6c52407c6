"""The plots of the tiers."""

from matplotlib.figure import Figure

from benchmarks.plots import SMALL, Row, bare, lines, panels, plain_logs, ticks

SIDES = {"all on the device": "C0", "an eighth, and host memory": "C2", "an eighth, no tier": "C3"}
TIERS = {"on_device": ("C0", "on the device"), "on_host": ("C2", "in host memory"), "on_disk": ("C4", "on the disk")}
WAYS = {"computed": "C3", "host": "C2", "disk, files in memory": "C1", "disk": "C4"}


def chat(embedded: Row, large: Row) -> Figure:
    """Draw the mean time to a first token by turn, of each side."""
    figure, axes = panels(10, 3.6, 1, 2)
    for axis, part, title in zip(axes, (embedded, large), ("Embedded checkpoint", "Shape of Qwen3-0.6B"), strict=True):
        turns = range(1, part["turns"] + 1)
        waits = {name: [1e3 * seconds for seconds in side["by_turn"]] for name, side in part["sides"].items()}
        lines(axis, turns, waits, [SIDES[name] for name in waits], xlabel="turn", ylabel="mean time to first token, ms")
        ticks(axis, turns)
        axis.set_ylim(0, None)
        axis.set_title(title, fontsize=10)
    axes[0].legend(**SMALL)
    return figure


def hit_rate(part: Row) -> Figure:
    """Draw the share of each tier, for growing host memory and for a growing disk."""
    figure, axes = panels(10, 3.8, 1, 2, sharey=True)
    least = min(row["host"] for row in part["rows"] if row["disk"])
    rows = {
        "host": [row for row in part["rows"] if not row["disk"]],
        "disk": [row for row in part["rows"] if row["host"] == least],
    }
    labels = {"host": "host memory, tokens", "disk": f"disk below {least // 1024}k of host memory, tokens"}
    for axis, (last, own) in zip(axes, rows.items(), strict=True):
        bottom = [0.0] * len(own)
        for key, (color, label) in TIERS.items():
            values = [100 * row[key] for row in own]
            axis.bar(range(len(own)), values, bottom=bottom, color=color, label=label)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axis.set_xticks(range(len(own)), [f"{row[last] // 1024}k" if row[last] else "none" for row in own])
        axis.set(xlabel=labels[last], ylim=(0, 100))
        bare(axis)
    axes[0].set_ylabel("% of prompt tokens found")
    axes[0].legend(loc="upper left", **SMALL)
    return figure


def break_even(embedded: Row, large: Row) -> Figure:
    """Draw the time to a first token against the length of the cached part."""
    figure, axes = panels(10, 3.6, 1, 2)
    for axis, part, title in zip(axes, (embedded, large), ("Embedded checkpoint", "Shape of Qwen3-0.6B"), strict=True):
        lengths = [row["cached"] for row in part["rows"]]
        waits = {name: [1e3 * row["ttft"][name] for row in part["rows"]] for name in WAYS}
        lines(axis, lengths, waits, list(WAYS.values()), xscale="log", xlabel="cached tokens")
        ticks(axis, lengths)
        plain_logs(axis)
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("time to first token, ms")
    axes[0].legend(**SMALL)
    return figure


PLOTS = {
    "m4_tiers_chat": ("chat_embedded chat_0_6b", chat),
    "m4_tiers_hit_rate": ("capacity", hit_rate),
    "m4_tiers_break_even": ("break_even_embedded break_even_0_6b", break_even),
}
