"""Before anything imports torch."""

from batchgen import share_cores

share_cores()
