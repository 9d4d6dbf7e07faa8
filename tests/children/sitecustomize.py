"""In processes that tests start the garbage collector looks through all objects as seldom as in the tests'.

It took a fifth of what such a process does: importing torch, and compiling one small model.
"""

import gc

gc.set_threshold(100_000, 20, 100)
