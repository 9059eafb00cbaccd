"""Worlds that differ: drawn anew for each episode, from lines that say what varies and how.

:mod:`spec` reads the lines, :mod:`fields` finds what they name in a scene, :mod:`checks` refuses what cannot be
simulated, :mod:`draw` makes a world's variation of them, :mod:`constants` derives what MuJoCo's compiler would.
"""
