"""The host side of the network path: the command ring's reader and the engine that feeds the transport."""
