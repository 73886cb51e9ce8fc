"""karui (軽い, "light"): train a language model to be light, then run it.

Importing this package is cheap: it brings neither torch nor transformers.
"""

__version__ = "0.1.0"
