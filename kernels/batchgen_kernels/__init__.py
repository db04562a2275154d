"""The ops a decoder needs beside matmul: natively in `cpu`, in plain torch with equal signatures in `reference`."""
