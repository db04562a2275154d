"""The ops a decoder needs beside matmul: `cpu` holds them natively, `reference` in plain torch with equal signatures."""
