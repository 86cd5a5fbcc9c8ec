"""What `outrider ps` does: look at every deployment that is up and show how it is."""

import json
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from cluster.deployment_state import DeploymentStateError, deployment_names, read_file
from cluster.deployment_status import examine
from cluster.outcome import DONE, FAILED, say_error
from cluster.status_view import as_json, view

_PIPED_WIDTH = 160  # where there is no screen whose width could be asked


def show_deployments(*, in_json: bool) -> int:
    """Do it and return the exit code: FAILED when anything is not as it should be."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=_PIPED_WIDTH)
    states, damages = [], []
    try:
        names = deployment_names()
    except DeploymentStateError as error:
        return say_error(err, str(error), FAILED)
    for name in names:
        try:
            states.append(read_file(name))
        except DeploymentStateError as error:
            damages.append(str(error))
    with ThreadPoolExecutor() as pool:  # one that hangs holds up no other
        reports = list(pool.map(examine, [state for state in states if state is not None]))
    if in_json:
        print(json.dumps({"deployments": [as_json(report) for report in reports], "damages": damages}))
    elif not reports and not damages:
        out.print("No deployment is up; `outrider up` starts one.")
    else:
        for report in reports:
            out.print(view(report))
    for damage in damages:
        say_error(err, damage, FAILED)
    return FAILED if damages or any(report.problems for report in reports) else DONE
