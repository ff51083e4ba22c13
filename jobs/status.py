"""`coldpress status [CAMPAIGN]`: progress of a campaign, or a list of all."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from freezer.cli import JsonOption, StoreOption, exiting, note, say, say_json
from freezer.errors import INFRASTRUCTURE, UsageError
from freezer.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@exiting(refused=INFRASTRUCTURE)
def main(
    campaign: Annotated[
        str | None,
        Argument(help="Name of the campaign. Default: list all campaigns of the store."),
    ] = None,
    store: StoreOption = "./store",
    as_json: JsonOption = False,
) -> None:
    """Print the progress of a campaign, whether it is running, has ended, or its driver died."""
    from pipeline.reporting import campaign_status, campaigns_in_words, in_words

    opened = Store.open(store)
    if campaign is not None:
        status = campaign_status(opened, campaign, note)
        lines = in_words(status, store)
        if as_json:
            say_json(status.to_json(), indent=1)
            return
    elif as_json:
        raise UsageError("--json needs the name of a campaign")
    else:
        lines = campaigns_in_words(opened, note)
    for line in lines:
        say(line)


if __name__ == "__main__":
    app()
