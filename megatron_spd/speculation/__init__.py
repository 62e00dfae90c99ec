"""The speculation module: what it reads, its rows in serving and in training, its losses."""
