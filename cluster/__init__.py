"""Ray glue: plain function in, path out. One file a stage; only cluster/ and jobs/ import ray."""
