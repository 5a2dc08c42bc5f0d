"""Ray glue: plain function in, path out; one module or package per stage. Only cluster/ and jobs/ use Ray."""
