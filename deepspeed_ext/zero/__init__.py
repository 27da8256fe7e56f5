"""The EP-aware ZeRO-1 optimizer: ownership (partition), flat buffers (flat_buffer), norm, agreement, and the step."""
