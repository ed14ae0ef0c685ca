"""The host side of the network path: the reader of the command ring, and the engine that feeds the transport."""
