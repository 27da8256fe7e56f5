"""The EP-aware ZeRO-1 optimizer: ownership (partition), flat buffers (family), norm, agreement, and the step."""
