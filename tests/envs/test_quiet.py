"""Output of libraries."""

import subprocess
import sys


def test_warp_says_nothing_on_a_machine_without_a_gpu():
    code = "import sys; from sheeplike.envs.mjx import patches; patches.start_warp(); print('heard', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "heard\n")


def test_warp_starts_where_stderr_is_closed():
    code = "from sheeplike.envs.mjx import patches; patches.start_warp(); print('started')"
    shell = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "started\n")
