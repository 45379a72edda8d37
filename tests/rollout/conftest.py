"""Tests share two cores with whatever else runs: one thread each, for threads that wait for a core cost all of it."""

import torch

torch.set_num_threads(1)
