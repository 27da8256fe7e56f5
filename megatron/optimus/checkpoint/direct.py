"""What accesses past the page cache (O_DIRECT) need, and how a file system refuses them."""

from __future__ import annotations

import errno
import mmap
import os

FLAG = getattr(os, "O_DIRECT", 0)
ALIGNED = max(4096, mmap.PAGESIZE)  # addresses, offsets and lengths; no disk here asks for more
REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
