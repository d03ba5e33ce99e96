"""What every room of the host uses: the project, folders, keys, parallel work, quantities as text."""
