"""Few threads for small tensors."""

import torch

# The tests run side by side on all cores: threads of one test would only be in the way of others.
torch.set_num_threads(1)
