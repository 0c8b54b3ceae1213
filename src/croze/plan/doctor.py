"""``croze doctor``: is this machine fit for croze, whatever is to be run."""

from __future__ import annotations

from pathlib import Path

from croze.plan import checks_host as host
from croze.plan import checks_install as install
from croze.plan.checks import Check, Finding, make

CHECKS = (
    Check(name="python", look=install.look_at_python),
    Check(name="packages", look=install.look_at_packages),
    Check(name="cores", look=host.look_at_cores),
    Check(name="memory", look=host.look_at_memory),
    Check(name="disk", look=host.look_at_disk),
    Check(name="shm", look=host.look_at_shared_memory),
    Check(name="limits", look=host.look_at_limits),
    Check(name="isolation", look=install.look_at_isolation),
    Check(name="extras", look=install.look_at_extras),
    Check(name="hub", look=install.look_at_hub),
    Check(name="torch", look=install.look_at_torch),
    Check(name="cuda", look=install.look_at_cuda, needs=("torch",)),
    Check(name="arithmetic", look=install.look_at_arithmetic, needs=("torch",)),
    Check(name="exactness", look=install.look_at_exactness, needs=("torch",)),
)


def diagnose(folder: Path) -> list[Finding]:
    """Look at this machine for runs that are started in ``folder``. Findings, failures first; raises nothing."""
    return make(CHECKS, folder)
