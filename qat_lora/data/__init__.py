"""Text sources, chat rendering with completion masks, and packing into rows of one length."""
