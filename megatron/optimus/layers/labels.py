"""What labels mean. Without torch, so that tools over data start at once."""

NO_LABEL = -100  # a position that nothing is to be predicted at
