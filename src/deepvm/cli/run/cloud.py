"""``deepvm run`` in a cloud, rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepvm.cli.render import print_json, stderr
from deepvm.errors import printable

if TYPE_CHECKING:
    from deepvm.runtime.cluster import Cluster
    from deepvm.runtime.run_spec import RunSpec


def start(
    on: str,
    cluster: Cluster,
    spec: RunSpec,
    *,
    name: str | None,
    options: Sequence[str],
    dry_run: bool,
    as_json: bool,
) -> None:
    from deepvm.runtime.supervise import cloud_run

    run = name or spec.new_name()
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        if dry_run and not as_json:
            print(printable(text))
        elif not dry_run:
            stderr.print(text, markup=False, soft_wrap=True)

    try:
        cloud_run.run_cloud(on, cluster, spec, name=run, options=options, dry_run=dry_run, show=show)
    except KeyboardInterrupt:
        if not dry_run:
            alone = "" if on == "ec2" else "; while nobody follows it, lost machines are not replaced"
            stderr.print(
                f"the run goes on in the cloud, and costs money: end it with deepvm run --down {run}{alone}",
                soft_wrap=True,
            )
        raise
    if as_json:
        print_json({"run": run, "on": on, "dry_run": dry_run, "said": said})


def end(name: str, *, as_json: bool) -> None:
    from deepvm.runtime.supervise import cloud_run

    removed = cloud_run.end(name)
    if as_json:
        print_json({"run": name, "outcome": "ended"} | ({} if removed is None else {"removed": removed}))
    elif removed:
        stderr.print(f"removed what killed runs left on this machine: {', '.join(removed)}", soft_wrap=True)
    elif removed is not None:
        stderr.print(f"run {name} is one of this machine and has ended: nothing of it is left to remove")
    else:
        stderr.print(f"run {name} is ended: nothing of it is left in the cloud")
