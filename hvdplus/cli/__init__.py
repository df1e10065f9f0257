"""The command line `hvdplus`: one typer application, each command in a module of its own."""

from __future__ import annotations

import sys

import typer

from hvdplus.cli import bench, doctor, install_horovod, run
from hvdplus.errors import HvdplusError

__all__ = ["app", "main"]

app = typer.Typer(
    name="hvdplus",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def hvdplus() -> None:
    """Horovod for today's PyTorch, TensorFlow and Keras 3.

    Start with `hvdplus install-horovod`: it builds Horovod 0.28.1 for the frameworks in this Python
    environment and checks with two ranks that it works. Then write `import hvdplus.torch as hvd` (or
    `hvdplus.tensorflow`, `hvdplus.keras`) where your script had `horovod`, and run it with
    `hvdplus run -np 2 -- python train.py`. Where something does not work, `hvdplus doctor` says what and why.
    """


app.command("install-horovod")(install_horovod.install_horovod)
app.command("doctor")(doctor.doctor)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.command("bench")(bench.bench)


def main() -> None:
    """Run the command line; an error this package foresaw is printed without a traceback."""
    try:
        app()
    except HvdplusError as error:
        typer.echo(f"hvdplus: {error}", err=True)
        sys.exit(1)
