"""What `quire top` is made of: the stream of a server, its state, and the screen that shows it. It needs no package."""
