"""The ops a decoder needs: natively in `cpu`, in plain torch with equal signatures in `reference`."""
