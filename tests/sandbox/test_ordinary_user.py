"""An ordinary user, without control groups: refused by default, contained at the level that is then accepted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.sandbox.needs import needs_sandbox

NOBODY = 65534
PYTHON = f"/usr/bin/python{sysconfig.get_python_version()}"

TRIED = {
    "processes": "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)",
    "memory": "x = bytearray(10**9)",
    "memory of many": "import os, time\nfor _ in range(8):\n    if os.fork() == 0: x = bytearray(10**8); time.sleep(60)\nos.wait()",
    "cpu": "import os\nos.fork()\nwhile True: pass",
    "disk": "open('/workspace/a', 'wb').write(bytes(20 << 20))",
    "host": "import os; print(os.path.exists('/etc/shadow'), open('/proc/self/status').read().count('CapEff:\\t0000000000000000'))",
}

SCRIPT = """
import asyncio, json, sys
from rollart.sandbox.limits import SandboxLimits, SandboxMissing
from rollart.sandbox.once import check
from rollart.sandbox.session import Sandbox
async def main():
    try: await check()
    except SandboxMissing as error: print(json.dumps(str(error)))
    limits = SandboxLimits(memory=200 << 20, disk=8 << 20, processes=16, wall_s=60, cpu_s=1, output=4096)
    async with Sandbox(limits, accept="rlimits") as sandbox:
        for name, code in json.load(sys.stdin).items():
            result = await sandbox.run(["python3", "-c", code])
            print(json.dumps([name, result.ended, (result.stdout + result.stderr)[-200:].decode()]))
asyncio.run(main())
"""


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_the_weaker_level_where_it_is_accepted() -> None:
    packages = sysconfig.get_path("purelib")
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"]
    become.append(f"PYTHONPATH={Path(__file__).parents[2]}:{packages}")
    if shutil.which("setpriv") is None or subprocess.run([*become, PYTHON, "-c", "import rollart, psutil, pyseccomp, dask"], check=False).returncode:
        pytest.skip(f"user {NOBODY} can't read {packages} with {PYTHON}")
    run = subprocess.run([*become, PYTHON, "-c", SCRIPT], input=json.dumps(TRIED), capture_output=True, text=True, cwd="/", check=False)
    assert run.returncode == 0, run.stderr
    refused, *said = [json.loads(line) for line in run.stdout.splitlines()]
    assert "no sandbox of level 'cgroups'" in refused and "systemd" in refused
    ended = {name: (how, last) for name, how, last in said}
    assert "Resource temporarily unavailable" in ended["processes"][1]
    assert "MemoryError" in ended["memory"][1]
    assert (ended["memory of many"][0], ended["cpu"][0]) == ("memory", "cpu")
    assert "No space left" in ended["disk"][1] or "File too large" in ended["disk"][1]
    assert ended["host"] == ("exited", "False 1\n")
