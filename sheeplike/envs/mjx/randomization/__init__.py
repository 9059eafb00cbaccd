"""Worlds that differ: drawn anew for each episode, from lines that say what varies and how.

:mod:`spec` reads the lines, :mod:`fields` finds what they name in a scene, :mod:`draw` makes a world's variation of
them, :mod:`constants` what MuJoCo derives from it, :mod:`effects` what is not of the model.
"""
