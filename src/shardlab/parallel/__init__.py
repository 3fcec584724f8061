"""How a step is split and stays the same: mesh, table, cut, dropout, loss, reduction, norm. One idea a file."""
