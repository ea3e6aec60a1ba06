"""`jitllm library`: what can be run by name."""

from jitllm.cli.terminal import columns


def library() -> None:
    """List the models that can be run by name: name, size, licence, source."""
    from jitllm.catalog import catalog
    from jitllm.units import format_size

    header = ("name", "size", "licence", "source")
    rows = [
        (entry.name, format_size(entry.n_bytes), entry.licence, entry.source)
        for entry in catalog().values()
    ]
    print("\n".join(columns([header, *rows])))
