"""What crosses process borders: typed messages, their codec, sockets, and the processes at the other end."""
