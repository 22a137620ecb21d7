"""On SIGUSR1 a process prints the stacks of all its threads. On the path of every process of a GPU cell, vLLM's own included."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, all_threads=True)
