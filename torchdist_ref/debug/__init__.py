"""Tools that find out what is wrong with a job; nothing here is needed while all goes well."""
