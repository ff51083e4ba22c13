#!/bin/sh
# Make a TLS certificate for a machine of a Ray cluster, signed by a private authority, which is created first if it is missing.
#
#     certificates.sh FOLDER MACHINE ADDRESS...
#     certificates.sh authority head 10.0.0.10 head.internal
#
# ADDRESS is an IP address or a host name under which the other machines reach this one: Ray compares them with the certificate.
# Copy FOLDER/MACHINE (tls.crt, tls.key, ca.crt) to the machine, and FOLDER/ca.key to no machine: whoever has it can join the
# cluster. The authority lasts ten years, a certificate one year. Run the command again to renew a certificate.
set -eu
umask 077

if [ $# -lt 3 ]; then
    sed -n 's/^# \{0,1\}//; 2,9p' "$0" >&2
    exit 2
fi
authority=$1 machine=$1/$2
shift 2

names=
for address; do
    case $address in
        *:*) names=$names,IP:$address ;;
        *[!0-9.]*) names=$names,DNS:$address ;;
        *) names=$names,IP:$address ;;
    esac
done

mkdir -p "$machine"
if [ ! -e "$authority/ca.key" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=Coldpress private authority" \
        -addext keyUsage=critical,keyCertSign -keyout "$authority/ca.key" -out "$authority/ca.crt"
fi
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=${machine##*/}" \
    -keyout "$machine/tls.key" -out "$machine/tls.csr"
# A Ray process is a server and a client.
printf '%s\n' "subjectAltName=${names#,}" extendedKeyUsage=serverAuth,clientAuth > "$machine/extensions"
openssl x509 -req -days 365 -in "$machine/tls.csr" -CA "$authority/ca.crt" -CAkey "$authority/ca.key" -CAcreateserial \
    -extfile "$machine/extensions" -out "$machine/tls.crt"
rm "$machine/tls.csr" "$machine/extensions"
cp "$authority/ca.crt" "$machine/ca.crt"
